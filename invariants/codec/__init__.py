"""How texts of a trace are written and read: signatures of calls, variables, collectives, definitions. Loaded in every recorded process."""
