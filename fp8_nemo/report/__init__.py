"""Run directories -> tables, figures, a page."""
