"""Exit bundles: verified loading, heads as ONNX nodes, and cutting the backbone into stages."""
