"""Open Inference Protocol v2 over gRPC, on a port of its own."""
