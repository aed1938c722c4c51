-- Health of a RampConfig: a plan is a fact and always healthy; its state is what people want to read.
local status = obj.status or {}
return {status = "Healthy", message = (status.state or "Proposed") .. (status.message and (": " .. status.message) or "")}
