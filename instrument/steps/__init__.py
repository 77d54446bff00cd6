"""What a step is: `acts` turns calls into training acts, `clock` counts them, `rounds`, `leaves` and `turns` tell whose they are."""
