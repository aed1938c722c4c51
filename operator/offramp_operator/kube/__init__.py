"""The Kubernetes shell: watches, a cache and a work queue feed reconcile; server-side apply acts."""
