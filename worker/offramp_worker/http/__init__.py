"""The two ports: Open Inference Protocol v2 for clients, state and plans for the control plane."""
