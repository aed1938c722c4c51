-- What `kubectl offramp tune --now` writes: an annotation that asks once. Git does not have it, so it is no difference.
local os = require("os")
obj.metadata.annotations = obj.metadata.annotations or {}
obj.metadata.annotations["earlyexit.dev/request"] = "tune/" .. os.date("!%Y-%m-%dT%H:%M:%SZ")
return obj
