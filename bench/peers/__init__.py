"""Offramp against other servers: the same ONNX model, the same core, single images, in one run."""
