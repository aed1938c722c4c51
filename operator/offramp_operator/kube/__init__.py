"""The Kubernetes shell: watches, a cache and a work queue feed reconcile; server-side apply acts.

cache.py          what is known of the cluster
client.py         the Kubernetes API as few typed calls on plain dictionaries
devices.py        what pods say of devices, as pure functions
failures.py       why a worker's pod does not run
fields.py         who owns which field of an object: `managedFields` of server-side apply
kinds.py          the kinds of object the operator reads and writes
lead.py           what a leader does: one queue for all managed kinds
leader.py         leader election on a `coordination.k8s.io` Lease
managed.py        the kinds that the operator reconciles
manifests.py      what a service's workers look like in a cluster
pods.py           what pods say about workers, as pure functions
pools.py          the Deployments of a service's pools, as pure functions
queue.py          a work queue of keys: each key at most once in the queue and at most once in work
rejected.py       pods that the kubelet rejected, and how many are asked for meanwhile
routes.py         what an HTTPRoute says of itself
runtime.py        kopf as the runtime of the operator's process
scaling.py        who decides how many workers a service has
services.py       services as a managed kind
session.py        the HTTP session that kopf asks the API server with
shards.py         services divided over the replicas of the operator
training_jobs.py  what a Job reports of the training it runs, as pure functions
trim.py           what is kept of an object
turns.py          whose workers may be replaced when the administrator changes what all of them run
watch.py          lists and watches of every kind
worker_class.py   what a WorkerClass adds to a service's workers
"""
