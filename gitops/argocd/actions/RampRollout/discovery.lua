-- Which decisions about a RampRollout mean something now: those that `kubectl offramp` would take.
local status, spec = obj.status or {}, obj.spec
local phase = status.phase or "Pending"
local finished = phase == "Succeeded" or phase == "RolledBack" or phase == "Aborted" or phase == "Superseded"
local ending = finished or phase == "RollingBack" or phase == "Promoting"
local open = not ending and spec.decision ~= "Abort"
-- The operator says so of a recommendation; only the service itself knows its mode.
local recommended = "recommended; spec.decision: Promote starts the canary, spec.decision: Abort declines"
local waits = phase == "Pending" and spec.cause == "Tuned" and spec.decision == nil and status.message == recommended
local function offer(enabled)
  return {disabled = not enabled}
end
return {
  promote = offer(open and spec.decision == nil and phase == "AwaitingPromotion"),
  approve = offer(open and waits),
  abort = offer(open or (phase == "Promoting" and spec.decision ~= "Abort")),
  pause = offer(open and not spec.paused),
  resume = offer(open and spec.paused == true),
}
