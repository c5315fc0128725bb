"""`kvtier accept`: whether storage is good enough for KV cache, in four gates that anyone can repeat.

`command` has the options and `plan` what they come to; `run` goes from gate to gate and `state` remembers,
so that a stopped run goes on. The gates are `arrival`, `single`, `recovery` and `stability`; `verdict` holds
what they found beside its limits. `local` and `remote` are the model they ask, `baseline` is an earlier
run's report, `system` says what was measured on. `report` makes the JSON and the tables, `page` the HTML
with the pictures of `charts`.
"""
