// SPDX-License-Identifier: Apache-2.0
//
// Draws a dashboard with Grafana's own component library. What Grafana itself adds to that library, and this page does in
// its place: running queries, variables, legends, transformations of table frames by the library's transformers, layout.
// The dashboard, and what to put for its variables, are in window.job; window.report is set when all is drawn.
import React from 'react';
import { createRoot } from 'react-dom/client';
import { firstValueFrom } from 'rxjs';
import {
  applyFieldOverrides, cacheFieldDisplayNames, createFieldConfigRegistry, createTheme, dateTime, FieldColorModeId, FieldType, identityOverrideProcessor,
  standardEditorsRegistry, standardFieldConfigEditorRegistry, standardTransformers, standardTransformersRegistry, toDataFrame,
  transformDataFrame, VizOrientation,
} from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, ThemeContext, TimeSeries } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';

const { dashboard, chosen, from, to, step, caption, height, row: ROW } = window.job;  // row: height of a row of the dashboard's grid, in pixels
const theme = createTheme({ colors: { mode: 'dark' } });
const COLUMN = window.innerWidth / 24;
const report = { panels: [], errors: [] };

standardEditorsRegistry.setInit(() => []);
const property = (path, custom = false) => ({
  id: custom ? `custom.${path}` : path, path, name: path, isCustom: custom, editor: () => null, override: () => null,
  process: identityOverrideProcessor, shouldApply: () => true, settings: {},
});
standardFieldConfigEditorRegistry.setInit(
  () => ['unit', 'min', 'max', 'decimals', 'displayName', 'thresholds', 'mappings', 'links', 'color'].map((path) => property(path)));
standardTransformersRegistry.setInit(() => ['mergeTransformer', 'organizeFieldsTransformer', 'filterFieldsByNameTransformer'].map((name) => {
  const transformation = standardTransformers[name];
  return { id: transformation.id, name, transformation: async () => transformation };
}));
const registry = createFieldConfigRegistry({
  useCustomConfig: (builder) => {
    for (const path of ['cellOptions', 'minWidth', 'width', 'drawStyle', 'lineWidth', 'fillOpacity', 'showPoints', 'stacking', 'thresholdsStyle']) {
      builder.addCustomEditor({ id: path, path, name: path, editor: () => null, override: () => null, process: identityOverrideProcessor,
                                shouldApply: () => true, settings: {}, defaultValue: undefined });
    }
  },
}, 'panel');

const fillIn = (expr) => expr.replace(/\$(\w+)/g, (_, name) => chosen[name] ?? '.*');

async function ask(path, parameters) {
  const answer = await (await fetch(`/api/v1/${path}?${new URLSearchParams(parameters)}`)).json();
  if (answer.status !== 'success') throw new Error(`${parameters.query}: ${answer.error}`);
  return answer.data.result;
}

// The frames that Grafana's data source for Prometheus would make of the answer.
async function framesOf(target) {
  const query = fillIn(target.expr);
  const result = target.instant ? await ask('query', { query, time: to }) : await ask('query_range', { query, start: from, end: to, step });
  if (target.format === 'table') {
    const labels = [...new Set(result.flatMap((series) => Object.keys(series.metric)))];
    return [toDataFrame({ refId: target.refId, fields: [
      { name: 'Time', type: FieldType.time, values: result.map((series) => series.value[0] * 1000) },
      ...labels.map((label) => ({ name: label, type: FieldType.string, values: result.map((series) => series.metric[label]) })),
      { name: `Value #${target.refId}`, type: FieldType.number, values: result.map((series) => Number(series.value[1])) },
    ] })];
  }
  return result.map((series) => {
    const name = target.legendFormat === '__auto' ? target.expr
      : target.legendFormat.replace(/\{\{(\w+)\}\}/g, (_, label) => series.metric[label] ?? '');
    const points = target.instant ? [series.value] : series.values;
    // Where Prometheus has no sample there is a gap.
    const times = target.instant ? points.map((point) => point[0]) : Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, i) => from + i * step);
    const values = new Map(points.map(([time, value]) => [Number(time), Number(value)]));
    return toDataFrame({ refId: target.refId, name, fields: [
      { name: 'Time', type: FieldType.time, values: times.map((time) => time * 1000) },
      { name: 'Value', type: FieldType.number, labels: series.metric, values: times.map((time) => values.get(time) ?? null), config: { displayNameFromDS: name } },
    ] });
  });
}

async function dataOf(panel) {
  let frames = (await Promise.all(panel.targets.map(framesOf))).flat();
  if (panel.transformations) frames = await firstValueFrom(transformDataFrame(panel.transformations, frames));
  const defaults = { color: { mode: panel.type === 'timeseries' ? FieldColorModeId.PaletteClassic : FieldColorModeId.Thresholds }, ...panel.fieldConfig.defaults };
  frames = applyFieldOverrides({ data: frames, fieldConfig: { defaults, overrides: panel.fieldConfig.overrides }, replaceVariables: (text) => text, theme,
                                 timeZone: 'utc', fieldConfigRegistry: registry });
  cacheFieldDisplayNames(frames);
  frames.forEach((frame, i) => frame.fields.forEach((field) => { field.state = { ...field.state, seriesIndex: i }; }));
  return frames;
}

const last = (field) => field.values.filter((value) => value !== null).at(-1);

function Content({ panel, frames, width, height }) {
  if (frames.length === 0) return 'No data';
  switch (panel.type) {
    case 'stat': {
      const [time, value] = frames[0].fields;
      return <BigValue theme={theme} width={width} height={height} value={value.display(last(value))} {...panel.options}
        sparkline={value.values.length > 1 ? { x: time, y: value } : undefined} />;
    }
    case 'bargauge':
      return frames.map((frame) => {
        const field = frame.fields[1];
        return <div key={frame.name} style={{ marginBottom: 4 }}>
          <BarGauge theme={theme} width={width} height={Math.min(34, height / frames.length - 4)} field={field.config} display={field.display}
            value={{ ...field.display(last(field)), title: frame.name }} orientation={VizOrientation.Horizontal} displayMode={panel.options.displayMode} />
        </div>;
      });
    case 'timeseries':
      return <TimeSeries frames={frames} timeZone="utc" width={width} height={height} structureRev={1}
        timeRange={{ from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: dateTime(from * 1000), to: dateTime(to * 1000) } }}
        legend={panel.options.legend} options={panel.options} />;
    case 'table':
      return <TableNG data={frames[0]} width={width} height={height} {...panel.options} initialSortBy={panel.options.sortBy}
        fieldConfig={panel.fieldConfig} enableVirtualization={false} />;
    default:
      throw new Error(`panels of type ${panel.type} are not known here`);
  }
}

class Boundary extends React.Component {
  state = { error: null };
  static getDerivedStateFromError(error) { return { error }; }
  componentDidCatch(error) { report.errors.push(`${this.props.title}: ${error.message}`); }
  render() { return this.state.error ? <pre>{String(this.state.error)}</pre> : this.props.children; }
}

function Panel({ panel, frames }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: x * COLUMN + 4, top: y * ROW + 56, width: w * COLUMN - 8, height: h * ROW - 8 };
  if (panel.type === 'row') return <div style={{ ...place, paddingTop: 4, fontWeight: 500 }}>▾ {panel.title}</div>;
  return <div style={place} data-panel={panel.id}>
    <Boundary title={panel.title}>
      <PanelChrome title={panel.title} description={panel.description} width={place.width} height={place.height}>
        {(width, height) => <Boundary title={panel.title}><Content panel={panel} frames={frames} width={width} height={height} /></Boundary>}
      </PanelChrome>
    </Boundary>
  </div>;
}

// Whether anything but background, axes and text is in the panel's canvases: those are grey.
function hasColor(element) {
  return [...element.querySelectorAll('canvas')].some((canvas) => {
    if (canvas.width === 0 || canvas.height === 0) return false;
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] > 0 && Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 60) return true;
    }
    return false;
  });
}

// What was drawn, as far as a program can see.
function look(panel, frames) {
  const element = document.querySelector(`[data-panel="${panel.id}"]`);
  return { title: panel.title, type: panel.type, frames: frames.length, rows: frames.reduce((most, frame) => Math.max(most, frame.length), 0),
           text: element?.innerText ?? '', color: element !== null && hasColor(element) };
}

async function main() {
  const data = new Map();
  for (const panel of dashboard.panels) {
    if (panel.type !== 'row') data.set(panel.id, await dataOf(panel));
  }
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ background: theme.colors.background.canvas, color: theme.colors.text.primary, fontFamily: theme.typography.fontFamily, height, position: 'relative' }}>
        <div style={{ padding: '10px 8px', fontSize: 18 }}>{dashboard.title} <span style={{ float: 'right', fontSize: 13, color: theme.colors.text.secondary }}>{caption}</span></div>
        {dashboard.panels.map((panel) => <Panel key={panel.id} panel={panel} frames={data.get(panel.id)} />)}
      </div>
    </ThemeContext.Provider>);
  const panels = dashboard.panels.filter((panel) => panel.type !== 'row');
  const drawn = () => panels.map((panel) => look(panel, data.get(panel.id)));
  // The library draws in steps of its own: until all is there, or so often that it never will be. Turns are counted, not seconds:
  // a page that stands still has not had its turns.
  const isMissing = (panel) => (panel.type === 'timeseries' ? !panel.color : panel.text.trim() === panel.title);
  for (let i = 0; i < 600 && drawn().some(isMissing); ++i) await new Promise((done) => setTimeout(done, 100));
  report.panels = drawn();
  window.report = report;
}
main().catch((error) => { report.errors.push(String(error.stack)); window.report = report; });
