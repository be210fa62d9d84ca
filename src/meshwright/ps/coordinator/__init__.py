"""What schedules functions onto workers, and keeps count of every one."""
