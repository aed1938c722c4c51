-- What `kubectl offramp approve` writes.
obj.spec.decision = "Promote"
return obj
