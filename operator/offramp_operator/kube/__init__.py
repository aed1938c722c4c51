"""The Kubernetes shell: kopf watches, a cache and a work queue feed reconcile; server-side apply acts."""
