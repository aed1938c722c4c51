"""The embedded shell: the same manifest and the same decisions, with worker processes and a state folder."""
