{{/* All names are fixed: there is one operator in a cluster, and its RBAC names its own objects. */}}
{{- define "holdfast.name" -}}
holdfast-operator
{{- end }}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: {{ include "holdfast.name" . }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "holdfast.labels" -}}
app.kubernetes.io/name: {{ include "holdfast.name" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: holdfast
{{- end }}

{{- define "holdfast.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* What starts the program, without its arguments. */}}
{{- define "holdfast.command" -}}
{{- if .Values.command -}}
{{ toYaml .Values.command }}
{{- else -}}
- {{ .Values.python | quote }}
- -m
- holdfast.operator
{{- end }}
{{- end }}

{{/* The secret in which the certificate lies. The program knows the first name. */}}
{{- define "holdfast.secret" -}}
{{- if eq .Values.certificates.mode "self" }}holdfast-operator-tls{{ else }}holdfast-operator-certificate{{ end }}
{{- end }}

{{/* What the operator's pods and that of the uninstall have in common: where they run, and as whom. */}}
{{- define "holdfast.placement" -}}
securityContext:
  runAsNonRoot: true
  {{- range $key := list "runAsUser" "runAsGroup" "fsGroup" }}
  {{- with get $.Values.securityContext $key }}
  {{ $key }}: {{ int64 . }}
  {{- end }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "holdfast.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "holdfast.env" -}}
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: HOME
  value: /tmp
- name: PYTHONUNBUFFERED
  value: "1"
- name: PYTHONDONTWRITEBYTECODE
  value: "1"
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* CEL: whether an object has one of some annotations. Takes a list: the variable, then the annotations. */}}
{{- define "holdfast.annotated" -}}
{{- $object := first . }}
{{- $found := list }}
{{- range rest . }}{{ $found = append $found (printf "'%s' in %s.metadata.annotations" . $object) }}{{ end -}}
(has({{ $object }}.metadata.annotations) && ({{ join " || " $found }}))
{{- end }}

{{/* CEL: whether an update adds an annotation or changes it. */}}
{{- define "holdfast.changed" -}}
{{- $same := printf "object.metadata.annotations['%s'] == oldObject.metadata.annotations['%s']" . . -}}
({{ include "holdfast.annotated" (list "object" .) }} && !({{ include "holdfast.annotated" (list "oldObject" .) }} && {{ $same }}))
{{- end }}

{{/* CEL: whether the pod template of a Ray group holds what the operator once put in. The way to the group, by fields. */}}
{{- define "holdfast.injected" -}}
{{- $place := first . }}
{{- $there := list }}
{{- range concat (rest .) (list "template" "metadata" "annotations") }}
{{- $place = printf "%s.%s" $place . }}
{{- $there = append $there (printf "has(%s)" $place) }}
{{- end -}}
({{ join " && " $there }} && 'holdfast.dev/injected' in {{ $place }})
{{- end }}
