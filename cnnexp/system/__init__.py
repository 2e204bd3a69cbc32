"""What everything above stands on.

Classes by name, with the plugins that add some; and the machine as all may use it: files that anybody may have made,
memory that may not be there.
"""
