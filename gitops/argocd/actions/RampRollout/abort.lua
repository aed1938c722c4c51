-- What `kubectl offramp abort` writes.
obj.spec.decision = "Abort"
return obj
