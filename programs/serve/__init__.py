"""What starts, watches, restarts and ends the processes of the service. Knows neither torch nor Robyn."""
