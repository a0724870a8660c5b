{{/* A release may have dots in its name, a Service none. */}}
{{- define "sft.name" -}}
{{- .Release.Name | replace "." "-" | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Of what lies outside of the release's namespace, where another release may have the same name. */}}
{{- define "sft.outerName" -}}
{{- printf "%s-%s" .Release.Namespace (include "sft.name" .) -}}
{{- end -}}

{{- define "sft.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "sft.name" .) -}}
{{- end -}}

{{- define "sft.selector" -}}
app.kubernetes.io/name: sft-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "sft.labels" -}}
{{ include "sft.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: sft
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* With a digest the tag only says for people which it is. */}}
{{- define "sft.image" -}}
{{- $tag := .Values.image.tag -}}
{{- if not (or $tag .Values.image.digest) }}{{ $tag = .Chart.AppVersion }}{{ end -}}
"{{ .Values.image.repository }}{{ with $tag }}:{{ . }}{{ end }}{{ with .Values.image.digest }}@{{ . }}{{ end }}"
{{- end -}}

{{/* The operator's settings: names as in operator/sft_operator/config.py. Empty values are left out. */}}
{{- define "sft.settings" -}}
{{- /* The usual condition of a chart that has this one among its dependencies, which sees it as a value of its own. */ -}}
{{- if and .Chart.IsRoot (hasKey .Values "enabled") -}}
{{- fail "enabled is for a chart of yours that has this one among its dependencies, as their condition: here it would do nothing, leave it out" -}}
{{- end -}}
{{- $pods := dict -}}
{{- range $key, $value := .Values.pods }}{{ if $value }}{{ $_ := set $pods $key $value }}{{ end }}{{ end -}}
{{- $settings := dict
  "pods" $pods
  "networkPolicy" (dict
    "enabled" .Values.networkPolicy.enabled
    "operatorNamespace" .Release.Namespace
    "operatorLabels" (fromYaml (include "sft.selector" .))
    "metricsNamespaces" .Values.networkPolicy.metricsNamespaces)
  "leaderElection" (dict
    "enabled" true
    "namespace" .Release.Namespace
    "name" (include "sft.name" .)
    "leaseSeconds" 15
    "renewSeconds" 4)
  "httpPort" 8080
  "logLevel" .Values.logLevel -}}
{{- if .Values.caBundle }}{{ $_ := set $settings "caBundle" .Values.caBundle }}{{ end -}}
{{- if .Values.watchNamespace }}{{ $_ := set $settings "namespace" .Values.watchNamespace }}{{ end -}}
{{- if .Values.store.uri -}}
{{- $s3 := dict -}}
{{- range $key, $value := .Values.store.s3 }}{{ if $value }}{{ $_ := set $s3 $key $value }}{{ end }}{{ end -}}
{{- $_ := set $settings "store" (dict "uri" .Values.store.uri "s3" $s3 "verify" .Values.store.verify "remove" .Values.store.remove) -}}
{{- else -}}
{{- include "sft.noStore" (omit .Values.store "operatorCredentialsSecret") -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings (deepCopy .Values.settings) -}}
{{- include "sft.withoutNulls" $settings -}}
{{- $store := $settings.store | default dict -}}
{{- if and .Values.store.operatorCredentialsSecret (not $store) -}}
{{- include "sft.noStore" (dict "operatorCredentialsSecret" .Values.store.operatorCredentialsSecret) -}}
{{- end -}}
{{- if and $store (not $store.uri) -}}
{{- fail "settings.store says how and store.uri is empty, so there would be no store: set store.uri to s3://bucket/prefix, or leave settings.store out" -}}
{{- end -}}
{{- if and $store.remove (not $store.verify) -}}
{{- fail "store.remove is true and store.verify is false: the operator removes only what it has read and found to be its own; set store.verify to true as well, or store.remove to false" -}}
{{- end -}}
{{- if contains "PRIVATE KEY-----" ($settings.caBundle | default "") -}}
{{- fail "caBundle holds a private key, which whoever reads ConfigMaps here, and every namespace with jobs, would be given: certificates alone" -}}
{{- end -}}
{{- $election := $settings.leaderElection -}}
{{- if gt (mulf 2 $election.renewSeconds) (float64 $election.leaseSeconds) -}}
{{- fail (printf "settings.leaderElection.renewSeconds is %v and leaseSeconds is %v: set renewSeconds to half of leaseSeconds at most" $election.renewSeconds $election.leaseSeconds) -}}
{{- end -}}
{{- if and (not $election.enabled) (gt (int .Values.replicas) 1) -}}
{{- fail (printf "settings.leaderElection.enabled is false and replicas is %v: all of them would work at once; set replicas to 1, or leave it out" .Values.replicas) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Takes away what was set to null, at any depth: Helm's word for "as if it had not been said", which the operator refuses. */}}
{{- define "sft.withoutNulls" -}}
{{- range $key := keys . -}}
{{- $value := get $ $key -}}
{{- if kindIs "invalid" $value }}{{ $_ := unset $ $key }}{{ else if kindIs "map" $value }}{{ include "sft.withoutNulls" $value }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Nothing, or a failure that names what is said of a store and would do nothing, as none is named. */}}
{{- define "sft.noStore" -}}
{{- $said := dict -}}
{{- range $key := list "verify" "remove" "operatorCredentialsSecret" -}}
{{- if $value := get $ $key }}{{ $_ := set $said (printf "store.%s" $key) $value }}{{ end -}}
{{- end -}}
{{- range $key, $value := .s3 -}}
{{- if and $value (ne (toString $value) "whenRequired") }}{{ $_ := set $said (printf "store.s3.%s" $key) $value }}{{ end -}}
{{- end -}}
{{- range $name, $value := $said -}}
{{- fail (printf "%s is %q and store.uri is empty, so it would do nothing: set store.uri to s3://bucket/prefix, or leave %s out" $name (toString $value) $name) -}}
{{- end -}}
{{- end -}}

{{/* What the operator may do where it serves jobs. No wildcards, and nothing on Secrets itself: but Jobs may mount them. */}}
{{- define "sft.rules" -}}
- apiGroups: [sftjob.dev]
  resources: [sftjobs]
  verbs: [get, list, watch, patch, delete]  # patch: the finalizer of deletionPolicy; delete: ttlSecondsAfterFinished
- apiGroups: [sftjob.dev]
  resources: [sftjobs/status]
  verbs: [patch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs/status]
  verbs: [patch]  # keeps a group off a node on which it fails: the template can change once startTime is away
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]  # delete: pods that a lost node cannot end, or that only a sidecar keeps
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]  # the same: their replacement waits until they have failed; it waits longer unless they are let go of
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]  # pods whose supervisors stand still
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, create, delete]  # delete: a child that was altered is made again as it was
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, delete]
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, create, patch, delete]  # pods of a job that are placed together
- apiGroups: [""]
  resources: [events]
  verbs: [list]  # why pods are not created or not started
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]  # whether a namespace is being deleted
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list, patch]  # why a queued job waits; spec.suspend of one
{{- end -}}
