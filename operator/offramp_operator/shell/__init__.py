"""The part of the control plane that both shells share: gather, decide once, act, over a :class:`Platform`."""
