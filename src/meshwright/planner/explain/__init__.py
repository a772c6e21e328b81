"""Why a layout wins, what does not fit, and what would change."""
