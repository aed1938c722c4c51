-- A tuning can be asked for where the tuner works.
local mode = (obj.spec.ramps or {}).mode or "Auto"
local tunes = (mode == "Auto" or mode == "Recommend") and not obj.spec.suspend
return {tune = {disabled = not tunes}}
