"""`kvtier bench cold-recovery`: how soon a restarted server answers again, by what its KV cache kept.

`client` talks to the endpoint, `wave` runs requests at once, `course` one wave after another, `summary`
makes figures of them, `clearing` takes caches away, `counters` reads what the devices delivered, and
`command` does it all in order.
"""
