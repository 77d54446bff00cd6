"""Bytes from ranks to the verifier: `endpoint` (sockets), `server`, `relay`, `nats`, `inbox`, and `fill` for what was lost."""
