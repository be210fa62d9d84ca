"""Pages for a browser: values to HTML, by the templates beside this room.

They need no server and no network; pictures are SVG, and the few lines of script only sort and
filter tables that are whole without them.
"""
