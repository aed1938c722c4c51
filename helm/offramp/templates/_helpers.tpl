{{/* Name of everything the chart makes: the release's name, with "offramp" in it. */}}
{{- define "offramp.fullname" -}}
{{- if contains "offramp" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-offramp" (.Release.Name | trunc 32 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* The fixed label set; nothing is copied from anywhere. */}}
{{- define "offramp.labels" -}}
{{ include "offramp.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "offramp.selectorLabels" -}}
app.kubernetes.io/name: offramp
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "offramp.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "offramp.fullname" .) -}}
{{- end -}}

{{- define "offramp.signingKeySecret" -}}
{{- .Values.signingKey.existingSecret | default (printf "%s-signing-key" (include "offramp.fullname" .)) -}}
{{- end -}}

{{- define "offramp.leaseName" -}}
{{- printf "%s-leader" (include "offramp.fullname" .) -}}
{{- end -}}

{{/*
What the operator may do, and nothing else: it writes the status of services but never a service, has no access to secrets, and
no rule has a wildcard. Verbs in alphabetical order, so that a missing or a doubled one shows.
*/}}
{{- define "offramp.operatorRules" -}}
- apiGroups: [earlyexit.dev]
  resources: [earlyexitservices]
  verbs: [get, list, watch]
- apiGroups: [earlyexit.dev]
  resources: [earlyexitservices/status]
  verbs: [get, patch]
- apiGroups: [earlyexit.dev]
  resources: [rampconfigs, ramprollouts]
  verbs: [create, delete, get, list, patch, update, watch]
- apiGroups: [earlyexit.dev]
  resources: [rampconfigs/status, ramprollouts/status]
  verbs: [get, patch, update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [create, delete, get, list, patch, watch]
# A pod belongs to a Deployment through a ReplicaSet; ownership is followed by reference, never by label.
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}
