"""The search: which settings are tried, which part of one fails, how it is made small, and what is a finding."""
