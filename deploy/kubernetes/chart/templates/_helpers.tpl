{{- define "vrambroker.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "vrambroker.labels" -}}
{{ include "vrambroker.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "vrambroker.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "vrambroker.probe" -}}
exec:
  command: [vramctl, status, --socket-dir={{ .Values.socketDir }}]
timeoutSeconds: 10
{{- end }}
