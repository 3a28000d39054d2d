# What several pips at once print, cut down to what a person who waits wants to know: which package
# they are at. `-v total=N` is the number of packages.

function told(words) {
  print "  " words
  fflush()
}

/^(Collecting|Processing|Requirement already satisfied:) / {
  count++
  name = $1 == "Requirement" ? $4 : $2
  sub(/.*\//, "", name)
  sub(/[=<>;].*|-[0-9].*/, "", name)
  if (count % 20 == 0) told(count " of " total ": " name)
}

/^ *Downloading / && $NF ~ /^[kMG]B\)$/ {
  file = $2
  sub(/.*\//, "", file)
  sub(/-[0-9].*/, "", file)
  size = substr($(NF - 1), 2) + 0
  unit = substr($NF, 1, 2)
  if (unit == "GB" || (unit == "MB" && size >= 50)) told("downloads " file ", " size " " unit)
}

/^Installing collected packages/ && count == total {
  told("all " count " are here; unpacks them, which takes a minute")
}
