# Runs in cpack. Without these tools cpack would silently make packages that depend on no library or have no man pages.
foreach(tool dpkg-shlibdeps file help2man)
  find_program(found_${tool} ${tool})
  if(NOT found_${tool})
    message(FATAL_ERROR "Debian packages need ${tool}: deploy/packages.sh build installs it")
  endif()
endforeach()
