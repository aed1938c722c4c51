{{/* Name of everything the chart makes: the release's name, with "offramp" in it. */}}
{{- define "offramp.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "offramp" .Release.Name -}}
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
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels and annotations of an object: `include "offramp.metadata" (dict "root" . "labels" MORE "annotations" MORE)`; the more special one wins. */}}
{{- define "offramp.metadata" -}}
labels:
  {{- toYaml (merge (dict) (.labels | default dict) (include "offramp.labels" .root | fromYaml)) | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Reference of an image: `include "offramp.image" (dict "root" . "image" .Values.image)`. A digest wins over a tag. */}}
{{- define "offramp.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
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

{{/* The Leases of all shards; a single one keeps the plain name, as the operator names them. */}}
{{- define "offramp.leaseNames" -}}
{{- $names := list (include "offramp.leaseName" .) -}}
{{- if gt (int .Values.shards) 1 -}}
{{- $names = list -}}
{{- range $shard := until (int .Values.shards) -}}
{{- $names = append $names (printf "%s-%d" (include "offramp.leaseName" $) $shard) -}}
{{- end -}}
{{- end -}}
{{- join ", " $names -}}
{{- end -}}

{{- define "offramp.workerClassRules" -}}
# What the administrator gives to workers (spec.worker.className).
- apiGroups: [earlyexit.dev]
  resources: [workerclasses]
  verbs: [get, list, watch]
{{- end }}

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
  resources: [workerpools]
  verbs: [get, list, watch]
- apiGroups: [earlyexit.dev]
  resources: [workerpools/status]
  verbs: [get, patch]
- apiGroups: [earlyexit.dev]
  resources: [rampconfigs, ramprollouts]
  verbs: [create, delete, get, list, patch, update, watch]
- apiGroups: [earlyexit.dev]
  resources: [rampconfigs/status, ramprollouts/status]
  verbs: [get, patch, update]
{{- if eq .Values.scope.kind "cluster" }}
{{ include "offramp.workerClassRules" . }}
{{- end }}
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
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, delete, get, list, patch, watch]
# To see a user's autoscaler of a Deployment, which is then left to scale it; and to make the one that spec.autoscaling asks for.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [create, delete, get, list, patch, watch]
{{- if .Values.rbac.httpRoutes }}
# Requests through a Gateway (spec.route). Only routes: Gateways are other people's.
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [create, delete, get, list, patch, watch]
{{- end }}
# The training of ramps on live traffic (spec.ramps.training), one at a time and never changed.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [create, delete, get, list, watch]
# Labels of the workers of a WorkerPool say which services they hold; the services' own pods are only read.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, patch, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}

{{/* Names under which the Service of the web page is reached in the cluster. */}}
{{- define "offramp.webNames" -}}
{{- $name := printf "%s-web" (include "offramp.fullname" .) -}}
{{- $name }},{{ $name }}.{{ .Release.Namespace }},{{ $name }}.{{ .Release.Namespace }}.svc,{{ $name }}.{{ .Release.Namespace }}.svc.cluster.local
{{- end }}

{{/* A quantity as a plain number. */}}
{{- define "offramp.quantity" -}}
{{- $number := regexFind "^[0-9]*\\.?[0-9]*([eE][+-]?[0-9]+)?" (toString .) -}}
{{- $units := dict "n" 1e-9 "u" 1e-6 "m" 1e-3 "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
    "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (float64 $number) (get $units (trimPrefix $number (toString .))) -}}
{{- end -}}

{{/* What a schema cannot say of values, because it compares two of them. */}}
{{- define "offramp.validate" -}}
{{- if gt (include "offramp.quantity" .Values.delivery.sizeLimit | float64) 1099511627776.0 -}}
{{- fail (printf "delivery.sizeLimit: %v is more than 1024Gi, which the operator refuses" .Values.delivery.sizeLimit) -}}
{{- end -}}
{{- range $name, $limit := .Values.resources.limits -}}
{{- $request := get ($.Values.resources.requests | default dict) $name -}}
{{- if and (ne (toString $request) "") (gt (include "offramp.quantity" $request | float64) (include "offramp.quantity" $limit | float64)) -}}
{{- fail (printf "resources.requests.%s: %v is more than resources.limits.%s, %v" $name $request $name $limit) -}}
{{- end -}}
{{- end -}}
{{- range $i, $rule := .Values.networkPolicies.operator.extraEgress -}}
{{- range $j, $port := $rule.ports -}}
{{- if and $port.endPort (lt (int $port.endPort) (int $port.port)) -}}
{{- fail (printf "networkPolicies.operator.extraEgress.%d.ports.%d.endPort: %v is below port %v" $i $j $port.endPort $port.port) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
