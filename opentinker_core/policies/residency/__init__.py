"""What of many policies is in memory: device slots ← host memory by bytes ← local disk ← snapshot store.

`HostTier` keeps values within a budget of bytes and leases them out; `LocalStates` keeps policy states
on local disk. Both are free of torch: what a value is, a `Backing` knows.
"""
