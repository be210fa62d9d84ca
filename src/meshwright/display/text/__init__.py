"""Values as plain text, which a terminal may show in colours and in its own width."""
