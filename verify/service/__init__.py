"""The process beside a job: `verifier` is its loop, `settings` what it is told, `teller` whom it tells."""
