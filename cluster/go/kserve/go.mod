// KServe's own definitions, config/crd/full of the module: read by tests, compiled into nothing. `go mod tidy` would drop them.
module offramp/cluster/kserve

go 1.26.0

require github.com/kserve/kserve v0.20.0
