"""The formats of a report, one file each, with `render(report) -> str`."""
