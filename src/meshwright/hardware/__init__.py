"""The catalogue of devices and clusters: TOML files whose every value has a unit, a source and a date."""
