# Run by cpack. Without these it would make packages that depend on no library or have no man pages, and say nothing.
foreach(tool dpkg-shlibdeps file help2man)
  find_program(found_${tool} ${tool})
  if(NOT found_${tool})
    message(FATAL_ERROR "Debian packages need ${tool}: deploy/packages.sh build installs it")
  endif()
endforeach()
