-- Health of a RampRollout. It is no part of an application's health, as it is not in Git: this is what the tree shows.
local status = obj.status or {}
local phase, message = status.phase or "Pending", status.message or ""
if phase == "Succeeded" then
  return {status = "Healthy", message = message}
end
if phase == "RolledBack" then
  return {status = "Degraded", message = (status.reason or phase) .. ": " .. message}
end
if phase == "Aborted" or phase == "Superseded" then
  return {status = "Healthy", message = phase .. ": " .. message}
end
local recommended = "recommended; spec.decision: Promote starts the canary, spec.decision: Abort declines"
if phase == "Paused" or phase == "AwaitingPromotion" or (phase == "Pending" and message == recommended) then
  return {status = "Suspended", message = message}
end
return {status = "Progressing", message = phase .. ": " .. message}
