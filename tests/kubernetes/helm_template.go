// SPDX-License-Identifier: Apache-2.0
//
// Renders a Helm chart as `helm template RELEASE CHART --namespace NAMESPACE -f VALUES...` does, as far as ours needs it: Helm itself
// is in no package of Debian. Like Helm it uses text/template with Sprig's functions, and sigs.k8s.io/yaml. A chart with files that
// Helm would take and this program does not know is refused.
//
// Usage: helm_template template RELEASE NAMESPACE CHART [VALUES...]
//
//	helm_template values CHART [VALUES...]      # the values that templates see, as JSON
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

type values = map[string]interface{}

func readYaml(path string) (values, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	read := values{}
	if err := yaml.UnmarshalStrict(text, &read); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return read, nil
}

// `over` takes the place of what it names in `under`; its nulls remove it. Maps are merged.
func merge(under, over values) values {
	for key, value := range over {
		inner, isMap := value.(values)
		below, wasMap := under[key].(values)
		switch {
		case value == nil:
			delete(under, key)
		case isMap && wasMap:
			under[key] = merge(below, inner)
		default:
			under[key] = value
		}
	}
	return under
}

func toYaml(value interface{}) string {
	text, err := yaml.Marshal(value)
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(text), "\n")
}

func functions(all *template.Template) template.FuncMap {
	made := sprig.TxtFuncMap()
	// As in Helm: nothing of the environment.
	delete(made, "env")
	delete(made, "expandenv")
	made["toYaml"] = toYaml
	made["include"] = func(name string, data interface{}) (string, error) {
		var text strings.Builder
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	made["required"] = func(warning string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return value, errors.New(warning)
		}
		return value, nil
	}
	made["fail"] = func(message string) (string, error) { return "", errors.New(message) }
	return made
}

// Chart.yaml as templates see it: .Chart.AppVersion for appVersion.
func chartOf(read values) values {
	chart := values{}
	for key, value := range read {
		chart[strings.ToUpper(key[:1])+key[1:]] = value
	}
	return chart
}

// What Helm would take from a chart and this program does not.
func refuseWhatHelmWouldTake(folder string) error {
	for _, name := range []string{"charts", "crds", "Chart.lock", ".helmignore"} {
		if _, err := os.Stat(filepath.Join(folder, name)); err == nil {
			return fmt.Errorf("%s has %s, which this program does not know", folder, name)
		}
	}
	return nil
}

func valuesOf(folder string, files []string) (values, error) {
	merged, err := readYaml(filepath.Join(folder, "values.yaml"))
	for _, file := range files {
		if err != nil {
			return nil, err
		}
		var over values
		if over, err = readYaml(file); err == nil {
			merged = merge(merged, over)
		}
	}
	return merged, err
}

func render(release, namespace, folder string, files []string) (string, error) {
	if err := refuseWhatHelmWouldTake(folder); err != nil {
		return "", err
	}
	chart, err := readYaml(filepath.Join(folder, "Chart.yaml"))
	if err != nil {
		return "", err
	}
	merged, err := valuesOf(folder, files)
	if err != nil {
		return "", err
	}

	names, err := filepath.Glob(filepath.Join(folder, "templates", "*"))
	if err != nil {
		return "", err
	}
	sort.Strings(names)
	all := template.New("")
	all.Funcs(functions(all)).Option("missingkey=zero")
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return "", err
		}
		if _, err := all.New(filepath.Base(name)).Parse(string(text)); err != nil {
			return "", err
		}
	}

	data := values{
		"Values":  merged,
		"Chart":   chartOf(chart),
		"Release": values{"Name": release, "Namespace": namespace, "Service": "Helm", "IsInstall": true, "IsUpgrade": false, "Revision": 1},
	}
	var out strings.Builder
	for _, name := range names {
		base := filepath.Base(name)
		if strings.HasPrefix(base, "_") || base == "NOTES.txt" {
			continue
		}
		var text bytes.Buffer
		if err := all.ExecuteTemplate(&text, base, data); err != nil {
			return "", err
		}
		// As Helm does: a value that is not there is nothing.
		rendered := strings.ReplaceAll(text.String(), "<no value>", "")
		if strings.TrimSpace(rendered) == "" {
			continue
		}
		fmt.Fprintf(&out, "---\n# Source: %s/templates/%s\n%s\n", chart["name"], base, strings.TrimRight(rendered, "\n"))
	}
	return out.String(), nil
}

func main() {
	args := os.Args[1:]
	var text string
	var err error
	switch {
	case len(args) >= 4 && args[0] == "template":
		text, err = render(args[1], args[2], args[3], args[4:])
	case len(args) >= 2 && args[0] == "values":
		var merged values
		if merged, err = valuesOf(args[1], args[2:]); err == nil {
			var encoded []byte
			encoded, err = json.Marshal(merged)
			text = string(encoded)
		}
	default:
		fmt.Fprintln(os.Stderr, "usage: helm_template template RELEASE NAMESPACE CHART [VALUES...] | values CHART [VALUES...]")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "helm_template:", err)
		os.Exit(1)
	}
	fmt.Print(text)
}
