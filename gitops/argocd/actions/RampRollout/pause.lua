-- What `kubectl offramp pause` writes.
obj.spec.paused = true
return obj
