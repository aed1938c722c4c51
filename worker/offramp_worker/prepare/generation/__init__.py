"""``offramp prepare --task generate``: from a checkpoint and prompts to a bundle whose variants and drafts are
measured."""
