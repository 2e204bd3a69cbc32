"""What everything stands on: classes by name and plugins; files that anybody may have made, memory that may not be."""
