-- What `kubectl offramp resume` writes.
obj.spec.paused = false
return obj
