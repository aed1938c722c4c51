-- What `kubectl offramp promote` writes.
obj.spec.decision = "Promote"
return obj
