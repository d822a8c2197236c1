"""Pipeline parallelism with schedules as data, as a plugin for femto."""
