"""Decoders of the Llama family behind the seam, computed by ONNX Runtime's own kernels."""
