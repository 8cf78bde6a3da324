// SPDX-License-Identifier: Apache-2.0
//
// node schema.mjs DASHBOARD...: checks dashboards against JSON schemas, made from the types of Grafana's SDK. Grafana
// generates the types from its own schemas. Prints all faults; exits 1 when a dashboard has a fault.
import Ajv from 'ajv';
import fs from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { createGenerator } from 'ts-json-schema-generator';

const sdk = path.join(path.dirname(fileURLToPath(import.meta.url)), 'node_modules/@grafana/grafana-foundation-sdk/dist');
const ajv = new Ajv.default({ allErrors: true, strict: false });

// Properties that the types do not know are errors: most unknown properties are misspelt.
const compiled = new Map();
function schema(module, type) {
  const name = `${module}.${type}`;
  if (!compiled.has(name)) {
    const file = path.join(sdk, module, 'types.gen.d.ts');
    const generated = createGenerator({ path: file, type, skipTypeCheck: true, additionalProperties: false, expose: 'all', topRef: true }).createSchema(type);
    compiled.set(name, ajv.compile(generated));
  }
  return compiled.get(name);
}

let faults = 0;
function check(where, module, type, value) {
  const validate = schema(module, type);
  if (validate(value)) return;
  for (const error of validate.errors) {
    console.log(`${where}: ${module}.${type}${error.instancePath} ${error.message} ${JSON.stringify(error.params)}`);
    ++faults;
  }
}

for (const file of process.argv.slice(2)) {
  const dashboard = JSON.parse(fs.readFileSync(file));
  const name = path.basename(file);
  // A dashboard's types leave queries and options open. The types of a panel's plugin check its options and queries.
  const open = structuredClone(dashboard);
  for (const panel of open.panels) {
    if (panel.targets) panel.targets = [];
  }
  // Grafana still saves an annotation's query beside the annotation's other fields, as before the types.
  for (const annotation of open.annotations.list) {
    for (const field of ['expr', 'titleFormat', 'step']) delete annotation[field];
  }
  check(name, 'dashboard', 'Dashboard', open);
  for (const panel of dashboard.panels) {
    if (panel.type === 'row') continue;
    const where = `${name}: ${panel.title}`;
    check(where, panel.type, 'Options', panel.options);
    const { custom } = panel.fieldConfig.defaults;
    if (custom) check(where, panel.type, 'FieldConfig', custom);
    for (const target of panel.targets) check(where, 'prometheus', 'Dataquery', target);
  }
}
console.log(`${faults} faults`);
process.exit(faults === 0 ? 0 : 1);
