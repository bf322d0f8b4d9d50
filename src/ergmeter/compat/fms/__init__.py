"""Result files in the form that FMS's programs and notebooks read."""
