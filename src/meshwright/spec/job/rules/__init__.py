"""What a job may not combine, each rule with the field to change."""
