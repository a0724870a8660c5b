{{/* What the operator may do, besides sft.rules, to pods that do not get on by themselves. */}}
{{- define "sft.interventions" -}}
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]  # pods whose supervisors stand still
{{- end -}}
