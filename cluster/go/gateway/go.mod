// Gateway API's own definitions, config/crd/standard of the module: read by tests, compiled into nothing. `go mod tidy` would drop them.
module offramp/cluster/gateway

go 1.26.0

require sigs.k8s.io/gateway-api v1.6.3
