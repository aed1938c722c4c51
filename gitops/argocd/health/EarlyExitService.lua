-- Health of an EarlyExitService, from its conditions. Only what a user asked for counts: tuning in the background never changes it.
local function condition(kind)
  for _, c in ipairs(obj.status.conditions or {}) do
    if c.type == kind then return c end
  end
  return {}
end

if obj.status == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "waiting for the operator to see this generation"}
end
local stalled, reconciling, ready = condition("Stalled"), condition("Reconciling"), condition("Ready")
if stalled.status == "True" then
  return {status = "Degraded", message = stalled.reason .. ": " .. stalled.message}
end
if ready.reason == "ScaledToZero" then
  return {status = "Suspended", message = ready.message}
end
if reconciling.status == "True" then
  return {status = "Progressing", message = reconciling.message}
end
if ready.status == "True" then
  return {status = "Healthy", message = obj.status.message or ready.message}
end
if ready.reason == "Starting" or ready.reason == nil then
  return {status = "Progressing", message = ready.message or "no worker is ready yet"}
end
return {status = "Degraded", message = ready.reason .. ": " .. ready.message}
